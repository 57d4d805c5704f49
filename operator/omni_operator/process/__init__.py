"""What keeps one operator process in order: election, workers, queue, health."""

"""What is wrong with an attempt's pods and the nodes under them, read from records alone. Pure."""

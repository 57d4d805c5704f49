"""Kubernetes operator: turns a MultimodalTrainingJob into placed, fenced, restartable pods."""

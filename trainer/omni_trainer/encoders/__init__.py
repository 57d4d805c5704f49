"""Modality encoders: packed samples in, language-model tokens out."""

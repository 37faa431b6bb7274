"""The image processors of the model families, one file each.

A module here defines `MODEL_TYPES`, the values of `model_type` in config.json that it supports, and `read(settings:
ImageSettings) -> ImageProcessor`.
"""

"""The image processors of the families of models, one file each.

A module here has `MODEL_TYPES`, the values of `model_type` in config.json that it reads, and
`read(settings: ImageSettings) -> ImageProcessor`.
"""

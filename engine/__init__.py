"""Safelight's engine: data sets, training, previews and files of diffusion models. See README.md."""

__version__ = "0.1.0"

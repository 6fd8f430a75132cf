"""Version of megarl."""

__version__ = "0.1.0"

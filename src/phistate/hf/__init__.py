"""Hugging Face transformers: existing hybrid models, fast on a CPU. Imports transformers only where it is used."""

from phistate.compat.report import Report as Report
from phistate.hf.accelerate import accelerate as accelerate

__all__ = ["Report", "accelerate"]

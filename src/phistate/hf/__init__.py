"""Hugging Face transformers: existing hybrid models, fast on a CPU. Imports transformers only where it is used."""

from phistate.hf.accelerate import accelerate as accelerate
from phistate.hf.report import Report as Report

__all__ = ["Report", "accelerate"]

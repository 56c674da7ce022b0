"""Reads files of other programs as graphs."""

from factormax.io.errors import UAIError
from factormax.io.model import UAIModel
from factormax.io.uai import read_uai

__all__ = ["UAIError", "UAIModel", "read_uai"]

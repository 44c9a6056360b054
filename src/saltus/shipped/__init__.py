"""Locate what comes with the package: drafters, heads and models."""

from pathlib import Path

SHIPPED = Path(__file__).parent

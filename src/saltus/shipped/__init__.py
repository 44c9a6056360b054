"""Locate what comes with the package: drafters, heads, models and sample texts."""

from pathlib import Path

SHIPPED = Path(__file__).parent

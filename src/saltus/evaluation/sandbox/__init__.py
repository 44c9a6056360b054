"""Run generated programs confined."""

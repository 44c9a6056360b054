"""Training of draft models: datasets, tasks with their losses, recipes, and a loop that resumes."""

"""What one process runs, needs and takes."""

"""What one rank checks of its own arguments. Nothing is sent."""

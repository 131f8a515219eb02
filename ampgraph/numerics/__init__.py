"""What low precision does to values: where they leave its range, and what to do about it."""

"""What a user can ask of a converted model, as tables, text and JSON."""

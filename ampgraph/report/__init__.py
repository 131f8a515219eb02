"""Reports about a converted model, as tables, text and JSON."""

"""Tasks of other libraries. Each is imported when it is chosen: `pip install -e '.[tasks]'` brings them."""

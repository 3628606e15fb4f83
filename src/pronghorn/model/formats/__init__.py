"""How frozen weights are stored: a table of formats (table.py), and what is the same for all of them."""

"""The two files that an exported folder's config.json names; `_bundle.py` flattens them."""

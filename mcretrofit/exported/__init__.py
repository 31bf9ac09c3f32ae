"""What an exported folder's config.json names: our decoder, or caching mixed into transformers' class."""

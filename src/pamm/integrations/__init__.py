"""Other libraries, one file each; only these files import them."""

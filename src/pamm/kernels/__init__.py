"""Fast implementations of what ``pamm.reference`` defines, one backend a file."""

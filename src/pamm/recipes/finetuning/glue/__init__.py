"""An encoder on the tasks of GLUE."""

"""A vision-language model on images by class."""

"""All results on one page, beside the paper's."""

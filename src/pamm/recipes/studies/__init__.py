"""The paper's studies: a grid of pre-trainings, and what compression does to a trained model."""

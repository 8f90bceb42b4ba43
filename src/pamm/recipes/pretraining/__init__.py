"""One model trained several times, differing in nothing but how inputs are kept."""

"""Many nodes at once: which they are, what is run on them, and what comes back."""

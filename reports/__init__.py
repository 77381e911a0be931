"""Pages and screens made from a stored run. Never imports torch."""

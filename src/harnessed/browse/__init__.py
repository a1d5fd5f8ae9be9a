"""What runs recorded, for people and scripts."""

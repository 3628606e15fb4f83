"""What is decided and refused before the first step."""

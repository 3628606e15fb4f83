"""What precedes the first layer."""

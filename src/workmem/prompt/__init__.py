"""What is on the wire and what it means. Pure: data in, data out."""

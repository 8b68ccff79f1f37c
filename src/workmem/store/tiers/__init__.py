"""Media that outlive a process."""

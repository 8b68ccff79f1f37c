"""Moving bytes between processes and hosts; what is promised is in `contract`."""

"""What everything else is made of: identity, layout, outcomes, events, errors, and shared contracts."""

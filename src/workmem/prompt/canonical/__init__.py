"""One form for every prompt that means the same: named rules, each in its own file, listed in `rules`."""

"""Why a prompt does not begin as an earlier one did: the causes, by name, found by comparing two request bodies."""

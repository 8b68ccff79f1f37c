"""How the bytes of a page are kept in a tier below dram: as they are, smaller, approximated, or sealed."""

"""For tests, here and elsewhere: fakes, builders, fault devices, and servers on free ports."""

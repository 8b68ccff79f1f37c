"""workmem: the working memory of an agent fleet. Compute a context once, reuse it everywhere."""

__version__ = "0.1.0.dev0"

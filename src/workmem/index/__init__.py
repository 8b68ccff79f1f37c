"""What is known of prompts and blocks: who came before, and what they share. Pure."""

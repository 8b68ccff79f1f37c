"""The tiers below vram: pages of KV in dram and on ssd, behind `contract.KVStore`."""

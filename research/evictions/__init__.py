"""Which cells an eviction policy keeps, for research.evaluate --evictions: other projects' rules, in float32."""

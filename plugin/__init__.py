"""What a trainer imports: reading, packing and balancing. Never loads Ray or `pipelines`."""

"""Measured collectives: as samples, on their topologies, and the tables that are fitted to them."""

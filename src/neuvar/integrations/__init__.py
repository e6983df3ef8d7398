"""Callbacks for frameworks of others: one module each, which is imported only by its name."""

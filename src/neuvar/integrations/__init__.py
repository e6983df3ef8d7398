"""Callbacks for other frameworks. Import each module by its name; nothing else imports it."""

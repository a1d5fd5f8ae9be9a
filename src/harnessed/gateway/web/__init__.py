"""The dashboard: pages for people who watch runs, served by the gateway behind its admin key."""

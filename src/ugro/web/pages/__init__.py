"""The routes of the dashboard's pages."""

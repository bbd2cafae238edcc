import pytest

from orthros_service.documents import DocumentCatalog


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/data/orthros.db"


@pytest.fixture
def catalog(url):
    catalog = DocumentCatalog(url)
    yield catalog
    catalog.close()

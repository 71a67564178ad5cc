// The peer of `slipstream bench cluster`: the same transfers through SimGrid, an independent engine.
// Compiled when the bench runs, where SimGrid's headers are installed; no part of the package.
//
// In: links with capacities, hosts, a path for every pair that communicates, transfers with their
// times. Out: when each transfer ended, and the processor time of the simulation.

#include <simgrid/s4u.hpp>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

namespace sg = simgrid::s4u;

namespace {

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Transfer {
  double at_s;
  double bytes;
  int src;
  int dst;
};

}  // namespace

int main(int argc, char **argv) {
  sg::Engine engine(&argc, argv);
  std::ifstream in(argv[1]);
  int hosts = 0, links = 0, pairs = 0, transfers = 0;
  in >> hosts >> links >> pairs >> transfers;
  auto *zone = sg::create_full_zone("zone");
  std::vector<sg::Host *> host;
  for (int h = 0; h < hosts; ++h) host.push_back(zone->create_host("h" + std::to_string(h), 1e9));
  std::vector<sg::Link *> link;
  for (int l = 0; l < links; ++l) {
    double bytes_per_s = 0.0;
    in >> bytes_per_s;
    link.push_back(zone->create_link("l" + std::to_string(l), bytes_per_s));
    link.back()->set_latency(0.0)->seal();
  }
  for (int p = 0; p < pairs; ++p) {
    int src = 0, dst = 0, hops = 0;
    in >> src >> dst >> hops;
    std::vector<sg::LinkInRoute> route;
    for (int k = 0; k < hops; ++k) {
      int id = 0;
      in >> id;
      route.emplace_back(link[id]);
    }
    zone->add_route(host[src]->get_netpoint(), host[dst]->get_netpoint(), nullptr, nullptr, route,
                    false);
  }
  std::vector<Transfer> all(static_cast<std::size_t>(transfers));
  for (Transfer &one : all) in >> one.at_s >> one.bytes >> one.src >> one.dst;
  zone->seal();

  std::vector<sg::CommPtr> under_way;
  sg::Actor::create("driver", host[0], [&] {
    for (const Transfer &one : all) {
      sg::this_actor::sleep_until(one.at_s);
      under_way.push_back(sg::Comm::sendto_async(host[one.src], host[one.dst],
                                                 static_cast<uint64_t>(one.bytes)));
    }
    for (auto &comm : under_way) comm->wait();
  });
  const double before = cpu_seconds();
  engine.run();
  const double spent = cpu_seconds() - before;
  std::printf("%.17g\n", spent);
  for (const auto &comm : under_way) std::printf("%.17g\n", comm->get_finish_time());
  return 0;
}
